"""The live page: its files, its content, and the stream that updates it."""
