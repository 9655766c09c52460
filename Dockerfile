# The worker's images, two targets of one build:
#
#   docker build --target worker -t dynworker:dev --build-arg VERSION=dev .
#   docker build --target sim -t dynworker-sim:dev --build-arg VERSION=dev .
#
# worker is the one binary on TensorRT-LLM's own image, sim the same binary on a small Debian with the simulated engine's configuration. Neither needs a writable root: what is written goes to /tmp and /home/worker.
# configs/k8s has the manifests; tools/dockerfile holds this file to its rules; scripts/image-steps carries out its steps where there is no image builder.

# cgo binds the binary to a C library. bookworm's (2.36) is not newer than that of TensorRT-LLM's Ubuntu 24.04 (2.39), and is the slim image's own.
ARG GO_IMAGE=golang:1.26-bookworm
ARG SLIM_IMAGE=debian:bookworm-slim
# The version that Dynamo 1.6.1 pins.
ARG TRTLLM_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc29

FROM ${GO_IMAGE} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# The Go toolchain is the image's, never one that is downloaded for the build.
ENV CGO_ENABLED=1 GOTOOLCHAIN=local CGO_CFLAGS="-O2 -g -Wno-deprecated-declarations"
ARG VERSION=dev
# Names are resolved by Go, so that nothing is loaded for it at run time. No "-z now" for the linker: the driver's library is bound when it is used, and there may be none.
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    go build -trimpath -buildvcs=false -tags netgo,osusergo -ldflags "-s -w -X dynworker/internal/cli.Version=${VERSION}" -o /out/worker ./cmd/worker

FROM ${SLIM_IMAGE} AS sim
# A user with a name: libraries that ask for it fail otherwise.
RUN groupadd --gid 10001 worker && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/worker --shell /usr/sbin/nologin worker
COPY --from=build /usr/bin/tini-static /usr/bin/tini
COPY --from=build /out/worker /usr/local/bin/worker
COPY configs/worker.sim.yaml /usr/share/dynworker/configs/worker.sim.yaml
COPY testdata/model /usr/share/dynworker/testdata/model
ARG VERSION=dev
LABEL org.opencontainers.image.title="dynworker-sim" \
      org.opencontainers.image.description="Dynamo worker with a simulated engine" \
      org.opencontainers.image.version="${VERSION}"
ENV HOME=/home/worker USER=worker
WORKDIR /home/worker
# The system server, where the manifests and Dynamo's operator have it, and the TCP request plane.
EXPOSE 9090 9091
USER 10001:10001
# tini reaps what others leave behind and passes SIGTERM on to the worker alone: with -g the engine would be hit as well, before its requests are finished.
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/worker"]
CMD ["serve", "--config", "/usr/share/dynworker/configs/worker.sim.yaml"]

FROM ${TRTLLM_IMAGE} AS worker
# The base image may be built as any user.
USER 0:0
RUN groupadd --gid 10001 worker && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/worker --shell /usr/sbin/nologin worker
COPY --from=build /usr/bin/tini-static /usr/bin/tini
COPY --from=build /out/worker /usr/local/bin/worker
ARG VERSION=dev
LABEL org.opencontainers.image.title="dynworker" \
      org.opencontainers.image.description="Dynamo worker for TensorRT-LLM" \
      org.opencontainers.image.version="${VERSION}"
# The caches of compilers that run with the engine are below HOME.
ENV HOME=/home/worker USER=worker
WORKDIR /home/worker
EXPOSE 9090 9091
USER 10001:10001
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/worker"]
CMD ["serve", "--config", "/etc/dynworker/worker.yaml"]
