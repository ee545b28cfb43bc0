"""The parts of `top`: the source of its values, their display, and the terminal.

Other folders import: `app`, `content`, `driver`, `source`.
"""
