"""The parts of `top`: the source of its values, its screens, and the clears that it requests.

Other folders import: `app`, `driver`, `source`.
"""
