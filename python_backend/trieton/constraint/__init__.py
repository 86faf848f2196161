"""The constraint language, and how an expression becomes a plane: one bit per edge of the trie."""

# The rules of the language in short, for a help text; in full they are in CONSTRAINTS.md.
RULES = (
    "set names joined by not, and, or (lower case; not binds tightest, then and) and parentheses; names are "
    "case-sensitive; a name with other characters than letters, digits and _ . : / - stands in double quotes, where "
    r"\" is a quote and \\ a backslash"
)
