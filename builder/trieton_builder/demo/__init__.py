"""The demo: MovieLens-100k from raw files to answers of the real server."""
