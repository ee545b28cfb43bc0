"""The screens of `top`, and the clears that it requests.

Other folders import: `app`.
"""
