# The image of the server. docs/operations/deploying.md says how to run it.
#
#   docker build -t kvmux .                                                      # CUDA, as PyTorch ships it for Linux
#   docker build -t kvmux --build-arg EXTRA_INDEX="<PyTorch's CPU wheel index>" .    # without a CUDA card: much smaller
#   docker build -t kvmux-load --target load .                                   # locust, with the load test's users
#   docker run -p 8000:8000 --stop-timeout 35 -v kvmux-caches:/home/kvmux/.cache -v ./models:/models:ro kvmux --model /models/my-model

ARG PYTHON=3.12

# ---------------------------------------------------------------- build: a virtual environment, with a compiler at hand
FROM python:${PYTHON}-slim AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/kvmux
ENV PATH=/opt/kvmux/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1

# The dependencies are a layer of their own: changing the source does not install them again.
ARG EXTRA_INDEX=""
# Extras of the package, separated by spaces: EXTRAS=ray for several replicas (docs/operations/cluster.md)
ARG EXTRAS=""
WORKDIR /src
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    export PIP_EXTRA_INDEX_URL="$EXTRA_INDEX" \
 && pip install --upgrade "setuptools>=77" wheel ninja \
 && python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*p['dependencies'], *(d for e in '$EXTRAS'.split() for d in p['optional-dependencies'][e]), sep='\n')" \
    > /tmp/requirements.txt \
 && pip install -r /tmp/requirements.txt

COPY . .
# Machines that run the image may have other instructions than the one that builds it.
RUN INSTRUCTION_SETS=all pip install --no-build-isolation --no-deps .

# ---------------------------------------------------------------- load: locust, which sends load to a server over HTTP
FROM python:${PYTHON}-slim AS load
RUN useradd --create-home --uid 10001 load
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /home/load
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['load'], sep='\n')" \
    > /tmp/requirements.txt \
 && python -m venv /opt/load \
 && /opt/load/bin/pip install -r /tmp/requirements.txt
ENV PATH=/opt/load/bin:$PATH
COPY loadtest loadtest
USER load
EXPOSE 8089
ENTRYPOINT ["locust", "-f", "loadtest/locustfile.py"]

# ---------------------------------------------------------------- run
FROM python:${PYTHON}-slim
RUN useradd --create-home --uid 10001 kvmux \
 && install --directory --owner=kvmux --group=kvmux /home/kvmux/.cache
COPY --from=build /opt/kvmux /opt/kvmux
ENV PATH=/opt/kvmux/bin:$PATH PYTHONUNBUFFERED=1
USER kvmux
WORKDIR /home/kvmux
EXPOSE 8000
STOPSIGNAL SIGTERM
# The start period ends when the server is ready, so a long one costs nothing and leaves time to download a model.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 CMD ["kvmux", "health"]
ENTRYPOINT ["kvmux", "serve", "--host", "0.0.0.0"]
