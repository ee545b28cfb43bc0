# The exporter: docker build -t gpumem-exporter . && docker run --rm -p 127.0.0.1:9844:9844 gpumem-exporter serve --demo
# With GPUs it needs the NVIDIA container toolkit and the host's PID namespace: see docs/installation.md.

# By the digest of the list of platforms. Dependabot proposes newer ones; --build-arg PYTHON_IMAGE=… takes another image.
ARG PYTHON_IMAGE=python:3.13-slim-trixie@sha256:9d2e5553305c7c7b0097999bb17187c69b921ccd6bc9d40e4bb5ebe652c00285

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# Exact versions with their hashes: deploy/image/lock.sh writes both files. The environments have no pip; the image's pip
# installs into them.
COPY deploy/image/*.txt ./
RUN python -m venv --without-pip /opt/gpumem \
    && python -m pip --python /opt/gpumem/bin/python install --require-hashes -r requirements.txt \
    && python -m venv --without-pip /opt/build \
    && python -m pip --python /opt/build/bin/python install --require-hashes -r build-requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY docs/runbooks docs/runbooks
COPY gpumem_exporter gpumem_exporter
RUN /opt/build/bin/hatchling build -t wheel -d /dist \
    && (cd client && /opt/build/bin/hatchling build -t wheel -d /dist) \
    && python -m pip --python /opt/gpumem/bin/python install --no-deps /dist/*.whl

FROM ${PYTHON_IMAGE}
ARG VERSION=
LABEL org.opencontainers.image.title="gpumem-exporter" \
      org.opencontainers.image.description="GPU memory of PyTorch processes as Prometheus metrics, with actions that release cached memory" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# The toolkit mounts the driver's libraries by these two variables; the exporter only needs NVML.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=utility \
    PATH=/opt/gpumem/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    GPUMEM_WEB_LISTEN_SOCKET=/run/gpumem/exporter.sock
COPY --from=build /opt/gpumem /opt/gpumem
# The folders of the socket and of GPUMEM_STORAGE_PATH, writable by the exporter also as new volumes.
RUN install -d -o 65532 -g 65532 -m 0755 /run/gpumem && install -d -o 65532 -g 65532 -m 0700 /var/lib/gpumem
USER 65532:65532
VOLUME /run/gpumem
EXPOSE 9844
STOPSIGNAL SIGTERM
# Uses the port of EXPOSE and ignores proxies in the environment. 503 means that the exporter does not work.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 9844, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["gpumem-exporter"]
CMD ["serve"]
