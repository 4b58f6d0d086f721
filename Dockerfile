# The server in an image:
#
#   docker build -t kvmux .                                                      # CUDA, as PyTorch ships it for Linux
#   docker build -t kvmux --build-arg EXTRA_INDEX="<PyTorch's CPU wheel index>" .    # without a CUDA card: far smaller
#   docker run -p 8000:8000 -v ./models:/models:ro kvmux --model /models/my-model

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
WORKDIR /src
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    export PIP_EXTRA_INDEX_URL="$EXTRA_INDEX" \
 && pip install --upgrade "setuptools>=77" wheel \
 && python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > /tmp/requirements.txt \
 && pip install -r /tmp/requirements.txt

COPY . .
RUN pip install --no-build-isolation --no-deps .

# ---------------------------------------------------------------- run
FROM python:${PYTHON}-slim
RUN useradd --create-home --uid 10001 kvmux
COPY --from=build /opt/kvmux /opt/kvmux
ENV PATH=/opt/kvmux/bin:$PATH PYTHONUNBUFFERED=1
USER kvmux
WORKDIR /home/kvmux
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-c", "\
import http.client, os, sys; \
server = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('KVMUX_PORT', 8000)), timeout=4); \
server.request('GET', '/health'); \
sys.exit(server.getresponse().status != 200)"]
ENTRYPOINT ["kvmux", "serve", "--host", "0.0.0.0"]
