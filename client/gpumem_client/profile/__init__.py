"""Memory profiles: which code and which objects hold the allocated bytes.

Other folders import: `model`.
"""
