"""Which queries of a batch share a call of the retriever."""

from trieton.search.prepare import Prepared

PADDING_TOKENS = 128  # padding in one call of the retriever; more costs more than a second call


def groups(queries: list[Prepared], most_beams: int) -> list[list[Prepared]]:
    """Queries that share a call of the retriever and the beam search, so that none pays much for its neighbours.

    A call costs what its widest beam and its longest prompt ask for. So widths of a group differ by less than a factor
    of two, its padding is bounded, and so are its beams: a larger group would need more memory and save no time.
    """
    found: list[list[Prepared]] = []
    tokens = 0  # of the prompts in the last group
    for query in sorted(queries, key=lambda q: (_octave(q.beam_width), len(q.prompt))):
        length, group = len(query.prompt), found[-1] if found else []
        if (
            group
            and _octave(group[0].beam_width) == _octave(query.beam_width)
            and len(group) * length - tokens <= PADDING_TOKENS
            and (len(group) + 1) * max(query.beam_width, *(q.beam_width for q in group)) <= most_beams
        ):
            group.append(query)
            tokens += length
        else:
            found.append([query])
            tokens = length
    return found


def _octave(width: int) -> int:
    return (width - 1).bit_length()
