#!/usr/bin/env bash
# Starts the server of the container image; `exec`, so that the container's SIGTERM reaches the server itself.
#
#   TRIETON_REPOSITORY        model repository (may be mounted read-only)          default /srv/trieton/models
#   TRIETON_CONTROL_KEY_FILE  file with the key of the model-control endpoints     default beside the repository
#   TRIETON_EXIT_TIMEOUT      seconds that requests in flight get at the end       default 30
#   TRIETON_ADDRESS           where to listen                                      default 0.0.0.0, the container's network
#   OTEL_EXPORTER_OTLP_ENDPOINT  collector (OTLP over HTTP) for the spans of requests with a header traceparent
#   further arguments         go to the server as they are
set -euo pipefail

repository=${TRIETON_REPOSITORY:-/srv/trieton/models}
key_file=${TRIETON_CONTROL_KEY_FILE:-$repository.rollout/control.key}
address=${TRIETON_ADDRESS:-0.0.0.0}

if [[ ! -s $key_file ]]; then
    echo "trieton: $key_file is missing or empty; expected the key that opens the model-control endpoints" >&2
    exit 1
fi
shopt -s nullglob
versions=("$repository"/generative_retriever/[0-9]*/)
if ((${#versions[@]} == 0)); then
    echo "trieton: $repository/generative_retriever has no version yet; publish a bundle first" >&2
    exit 1
fi
for version in "${versions[@]}"; do
    # The server would hang on such a folder for ever, deaf to SIGTERM.
    if [[ ! -f ${version}model.py ]]; then
        echo "trieton: $version has no model.py; it is not a version, remove it" >&2
        exit 1
    fi
done

# Models of their own that the retriever of the version that will answer asks (engine bls).
asked=()
newest=$(printf '%s\n' "${versions[@]}" | sort -V | tail -n 1)
if [[ -f ${newest}retriever/models.json ]]; then
    while read -r name; do asked+=(--load-model="$name"); done < <(grep -oP '"model": "\K[^"]+' "${newest}retriever/models.json")
fi

# `load` with a `file:` parameter runs whatever Python it is given: whoever may control models owns the container.
control="model-repository,shared-memory,trace,logging:trieton-control-key=$(<"$key_file")"

# Headers reach the models as request parameters. (The server's own tracing holds its end with a collector that hangs.)
tracing=()
if [[ -n ${OTEL_EXPORTER_OTLP_ENDPOINT:-}${OTEL_EXPORTER_OTLP_TRACES_ENDPOINT:-} ]]; then
    tracing=(--{http,grpc}-header-forward-pattern='(?i)^(traceparent|tracestate)$')
fi

# Our configuration is complete; to guess at it the server would start every model twice.
# strict-readiness off: one failed load of a new version would turn the whole server unready while the old version
# serves. Readiness is asked per model. Summaries of latencies are off by default; the dashboard shows their quantiles.
# Pings of clients that wait are welcome every 5 s; by default the server ends connections that send them more often than
# every 5 minutes. A connection ends in order after 5 minutes: its client looks up the name anew and finds new servers.
# 16 MiB of /dev/shm per instance hold a batch of the longest lists; from the default of 1 MiB it would grow under load.
exec tritonserver \
    --model-repository="$repository" \
    --model-control-mode=explicit \
    --load-model=generative_retriever "${asked[@]}" \
    --http-address="$address" \
    --grpc-address="$address" \
    --metrics-address="$address" \
    --http-restricted-api="$control" \
    --grpc-restricted-protocol="$control" \
    --disable-auto-complete-config \
    --strict-readiness=false \
    --metrics-config=summary_latencies=true \
    --backend-config=python,shm-default-byte-size=16777216 \
    --grpc-http2-min-recv-ping-interval-without-data=5000 \
    --grpc-max-connection-age=300000 \
    --exit-timeout-secs="${TRIETON_EXIT_TIMEOUT:-30}" \
    "${tracing[@]}" "$@"
