"""The trie over semantic IDs as flat arrays, the item table, named sets, and their files."""
