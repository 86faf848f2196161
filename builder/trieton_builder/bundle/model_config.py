"""The one template of the served model's config.pbtxt, and of the thin ensemble beside it."""

from string import Template

MODEL_NAME = "generative_retriever"
ENSEMBLE_NAME = "recommend"

_RETRIEVER = Template("""\
# Written by trieton_builder.bundle.model_config.render_config; change the template, not this file.
name: "$name"
backend: "python"
max_batch_size: $max_batch_size

# Every input is optional for the server because a request brings either `history` or `input_ids`; the model itself
# refuses neither and both. Send all four nevertheless, empty ([1, 0]) when unused: the server never puts requests with
# different sets of optional inputs into one batch.
# allow_ragged_batch: without it only requests of exactly equal length would share a batch. The model pads.
input [
  {
    name: "history"  # item ids, oldest first; $padding is padding and skipped
    data_type: $id_type
    dims: [ -1 ]
    optional: true
    allow_ragged_batch: true
  },
  {
    name: "input_ids"  # raw prompt tokens instead of a history; -1 is padding and skipped
    data_type: TYPE_INT32
    dims: [ -1 ]
    optional: true
    allow_ragged_batch: true
  },
  {
    name: "include_items"  # if any: only these items may be returned; $padding is padding
    data_type: $id_type
    dims: [ -1 ]
    optional: true
    allow_ragged_batch: true
  },
  {
    name: "exclude_items"  # these items are never returned; $padding is padding
    data_type: $id_type
    dims: [ -1 ]
    optional: true
    allow_ragged_batch: true
  }
]

# K = num_results of the request, L = levels of the version's semantic IDs.
output [
  {
    name: "item_ids"  # best first; padding $padding
    data_type: $id_type
    dims: [ -1 ]
  },
  {
    name: "scores"  # summed log-probability; padding is the lowest finite float32, since JSON knows no infinity
    data_type: TYPE_FP32
    dims: [ -1 ]
  },
  {
    name: "codes"  # padding -1
    data_type: TYPE_INT32
    dims: [ -1, -1 ]
  },
  {
    name: "num_results"  # how many of the K are real
    data_type: TYPE_INT32
    dims: [ 1 ]
  },
  {
    name: "num_unknown"  # ids of the history that the version's catalogue does not have; they were skipped
    data_type: TYPE_INT32
    dims: [ 1 ]
  },
  {
    name: "num_unknown_listed"  # the same for the ids of include_items and exclude_items, each id counted once a list
    data_type: TYPE_INT32
    dims: [ 1 ]
  },
  {
    name: "certified"  # proven to be the true top of everything allowed, not only of the beam
    data_type: TYPE_BOOL
    dims: [ 1 ]
  },
  {
    name: "bundle_id"  # which bundle answered
    data_type: TYPE_STRING
    dims: [ 1 ]
  },
  {
    name: "error"  # why this row has no answer, beginning with the status; empty where it has one
    data_type: TYPE_STRING
    dims: [ 1 ]
  },
  {
    name: "description"  # JSON about this version; sent only where the parameter `describe` is true
    data_type: TYPE_STRING
    dims: [ 1 ]
  }
]

dynamic_batching {
  # Nothing waits for company: while one batch is searched the next one gathers in the queue, so batches grow with the
  # load by themselves and a lone request pays nothing.
  max_queue_delay_microseconds: 0
$queue_policy}

instance_group [
  {
    # Each instance is a process of its own. On a CPU they share the mapped index.
    kind: $instance_kind
    count: $instances
  }
]

# Off: a version number may be loaded again after a rollback, and the cache would answer from what it was before.
response_cache {
  enable: false
}

# Request parameters `num_results` and `beam_width` have these defaults and maxima. A default beam is widened to
# num_results where that is larger; a beam_width that was asked for is taken as it is, or refused.
parameters [
  { key: "default_num_results" value: { string_value: "$default_num_results" } },
  { key: "max_num_results" value: { string_value: "$max_num_results" } },
  { key: "default_beam_width" value: { string_value: "$default_beam_width" } },
  { key: "max_beam_width" value: { string_value: "$max_beam_width" } },
  # Longest history, include or exclude list of one request. The prompt keeps the newest part of a long history.
  { key: "max_list_items" value: { string_value: "$max_list_items" } },
  # Bytes of logits of one decode; a larger batch is searched in parts. 0 is 64 MiB, on a GPU 1 GiB.
  { key: "decode_bytes" value: { string_value: "$decode_bytes" } },
  # Kernel of the constrained step: auto, torch, cpu or gpu.
  { key: "kernel" value: { string_value: "$kernel" } },
  # Threads of one operator of an instance. More than one helps only where cores stand idle; never more than the
  # container may use are taken.
  { key: "threads" value: { string_value: "$threads" } }
]
""")

# Measured on 2.51.0: after a large or abandoned request 27 of 60 small ones waited 0.5 s where there was a policy or
# priority levels (max_queue_size, a timeout or levels, each alone), 0 of 60 where there was neither.
_NO_POLICY = """\
  # No queue policy and no priority levels: with either, server 2.51.0 lets requests wait for half a second although the
  # model is free. What bounds the queue is the deadline of each gRPC call: cancelled requests leave it.
"""
_POLICY = Template("""\
  # A full queue answers UNAVAILABLE at once; a longer one would only serve people who have already left. The price on
  # server 2.51.0: with a policy its batcher now and then sleeps for half a second while a request waits.
  default_queue_policy { max_queue_size: $max_queue_size }
""")

_ENSEMBLE = Template("""\
# Written by trieton_builder.bundle.model_config.render_ensemble_config; change the template, not this file.
# For callers who need only history -> item_ids, scores. It has one step, so an answer comes from one bundle also while
# versions change. Request parameters (num_results, beam_width, constraint) pass through.
name: "$name"
platform: "ensemble"
max_batch_size: $max_batch_size
input [ { name: "history" data_type: $id_type dims: [ -1 ] } ]
output [
  { name: "item_ids" data_type: $id_type dims: [ -1 ] },
  { name: "scores" data_type: TYPE_FP32 dims: [ -1 ] }
]
ensemble_scheduling {
  step [
    {
      model_name: "$composing"
      model_version: -1
      input_map { key: "history" value: "history" }
      output_map { key: "item_ids" value: "item_ids" }
      output_map { key: "scores" value: "scores" }
    }
  ]
}
""")


def render_config(
    *,
    name: str = MODEL_NAME,
    text_ids: bool = False,
    max_batch_size: int = 32,
    instances: int = 1,
    device: str = "cpu",
    default_num_results: int = 10,
    max_num_results: int = 100,
    default_beam_width: int = 20,
    max_beam_width: int = 256,
    max_list_items: int = 10_000,
    decode_bytes: int = 0,
    max_queue_size: int = 0,
    kernel: str = "auto",
    threads: int = 1,
) -> str:
    """The config.pbtxt of `generative_retriever`.

    Args:
        name: the model's name; another one serves a second catalogue beside the first.
        text_ids: item ids of the catalogue are strings (else int64).
        device: "cpu", or "gpu" for one group of instances per visible GPU.
        decode_bytes: logits of one decode, requests * beams * vocabulary * 4 bytes; 0 is the engine's own bound.
        max_queue_size: requests that may wait; 0 sets no bound, see the comment in the result.
        threads: of one operator, per instance; 0 is 1.

    Raises:
        ValueError: a number that is not positive, a default above its maximum, an unknown device or kernel.
    """
    counts = {
        "max_batch_size": max_batch_size,
        "instances": instances,
        "default_num_results": default_num_results,
        "max_num_results": max_num_results,
        "default_beam_width": default_beam_width,
        "max_beam_width": max_beam_width,
        "max_list_items": max_list_items,
    }
    for option, value in counts.items():
        if value < 1:
            raise ValueError(f"{option}: expected a positive number, got {value}")
    for what in ("num_results", "beam_width"):
        default, largest = counts[f"default_{what}"], counts[f"max_{what}"]
        if default > largest:
            raise ValueError(f"default_{what}: expected at most max_{what} = {largest}, got {default}")
    if max_num_results > max_beam_width:
        raise ValueError(f"max_num_results: expected at most max_beam_width = {max_beam_width}, got {max_num_results}")
    if device not in ("cpu", "gpu"):
        raise ValueError(f"device: expected 'cpu' or 'gpu', got {device!r}")
    if kernel not in ("auto", "torch", "cpu", "gpu"):
        raise ValueError(f"kernel: expected 'auto', 'torch', 'cpu' or 'gpu', got {kernel!r}")
    zero_is_own = {"decode_bytes": decode_bytes, "threads": threads}
    for option, value in {**zero_is_own, "max_queue_size": max_queue_size}.items():
        if value < 0:
            raise ValueError(f"{option}: expected 0 or a positive number, got {value}")
    return _RETRIEVER.substitute(
        counts,
        **zero_is_own,
        name=name,
        id_type=_id_type(text_ids),
        padding='""' if text_ids else "-1",
        instance_kind=f"KIND_{device.upper()}",
        queue_policy=_POLICY.substitute(max_queue_size=max_queue_size) if max_queue_size else _NO_POLICY,
        kernel=kernel,
    )


def render_ensemble_config(*, text_ids: bool = False, max_batch_size: int = 32) -> str:
    """The config.pbtxt of the ensemble `recommend`; both arguments must equal those of `render_config`."""
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size: expected a positive number, got {max_batch_size}")
    return _ENSEMBLE.substitute(
        name=ENSEMBLE_NAME, max_batch_size=max_batch_size, id_type=_id_type(text_ids), composing=MODEL_NAME
    )


def _id_type(text_ids: bool) -> str:
    return "TYPE_STRING" if text_ids else "TYPE_INT64"
