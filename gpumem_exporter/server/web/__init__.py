"""The live page: its files, its content, and the history that it shows.

Other folders import: `page`, `runbooks`.
"""
