# One image for the reducer, the trainer and the explorers.

# What is installed, apart from the code. reasoning-gym needs a package that is built by a C compiler;
# the final image has none.
FROM python:3.11-slim-bookworm AS dependencies
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /tmp/dependencies
COPY constraints.txt ./
# The package index for torch, as in the Makefile: empty is pip's own; another for the small build
# without CUDA.
ARG TORCH_INDEX=
RUN pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY pyproject.toml ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
    print(*p['build-system']['requires'], *p['project']['dependencies'], \
    *(package for extra in ('dashboard', 'metrics', 'workers') \
      for package in p['project']['optional-dependencies'][extra]), \
    sep='\n')" > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt

FROM python:3.11-slim-bookworm
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
# A new volume takes the owner of the folder that it is mounted on.
RUN useradd --create-home --uid 10001 trinity \
    && install -d -o trinity -g trinity /checkpoints /home/trinity/.trinity-events
COPY --from=dependencies /opt/venv /opt/venv
COPY . /opt/trinity-events
RUN pip install --no-cache-dir --no-deps --no-build-isolation /opt/trinity-events
USER trinity
WORKDIR /home/trinity
ENTRYPOINT ["trinity-events"]
CMD ["--help"]
