"""Sort the rows of a catalogue and build the index from them."""
