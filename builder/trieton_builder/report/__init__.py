"""What an index, a bundle or an answer looks like, as text and as pages."""
