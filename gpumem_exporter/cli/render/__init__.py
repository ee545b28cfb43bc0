"""What commands print: tables, bars and sizes.

Other folders import: `action_tables`, `columns`, `layout`, `node_tables`, `terminal`.
"""
