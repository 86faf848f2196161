"""The declaration of an exported retriever, and the engines that run its graphs."""
