"""The commands, one file each.

Other folders import: `actions`.
"""
