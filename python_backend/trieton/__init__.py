"""The part of Trieton that runs inside the server: index, constraints, beam search, retriever, serving."""
