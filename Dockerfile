# The exporter, on its own: docker build -t gpumem-exporter . && docker run --rm -p 127.0.0.1:9844:9844 gpumem-exporter serve --demo
# With GPUs it needs the NVIDIA container toolkit and the host's PID namespace: see docs/installation.md.

ARG PYTHON_IMAGE=python:3.13-slim-trixie

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY gpumem_exporter gpumem_exporter
# The environment holds no pip: the one outside fills it.
RUN python -m venv --without-pip /opt/gpumem \
    && python -m pip --python /opt/gpumem/bin/python install ".[kubernetes,web]"

FROM ${PYTHON_IMAGE}
ARG VERSION=
LABEL org.opencontainers.image.title="gpumem-exporter" \
      org.opencontainers.image.description="Where every byte of GPU memory went in PyTorch processes, as Prometheus metrics, and a way to give it back" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# The toolkit mounts the driver's libraries that these two ask for: NVML is all that is needed.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=utility \
    PATH=/opt/gpumem/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    GPUMEM_WEB_LISTEN_SOCKET=/run/gpumem/exporter.sock
COPY --from=build /opt/gpumem /opt/gpumem
# The socket's folder, and one for GPUMEM_STORAGE_PATH: a new volume that is mounted there is the exporter's to write.
RUN install -d -o 65532 -g 65532 -m 0755 /run/gpumem && install -d -o 65532 -g 65532 -m 0700 /var/lib/gpumem
USER 65532:65532
VOLUME /run/gpumem
EXPOSE 9844
STOPSIGNAL SIGTERM
# Over the port that EXPOSE names, past any proxy in the environment. 503 is an exporter that cannot do its work.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 9844, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["gpumem-exporter"]
CMD ["serve"]
