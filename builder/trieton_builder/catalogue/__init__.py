"""Tables as people have them: items, named sets, vectors, semantic IDs."""
