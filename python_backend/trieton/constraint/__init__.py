"""The constraint language, and how an expression becomes a plane: one bit per edge of the trie."""
