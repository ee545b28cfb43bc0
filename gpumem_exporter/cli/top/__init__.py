"""The screens of `top`, the clears that it requests, and the driver alone.

Other folders import: `app`, `driver`.
"""
