# One reader's server: JupyterLab on a copy of the course in /home/reader.
#
#     docker build --tag minikv .
#     docker run --rm -p 8888:8888 -v minikv-ada:/home/reader minikv
#
# docs/teaching/hub/ starts the same image for each student of a class.
FROM python:3.11-slim-bookworm

# jupyterhub's version must be that of the hub.
ARG JUPYTERHUB=6.1.1
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# Triton's interpreter and Numba need no compiler; git is for readers who want it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 reader

WORKDIR /opt/minikv
COPY requirements.txt constraints.txt ./
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" \
    -r requirements.txt "jupyterhub==$JUPYTERHUB"
COPY . .
RUN pip install --no-cache-dir --no-deps . \
    && jupyter labextension disable "@jupyterlab/apputils-extension:announcements"

# Compiles the engine's step once, for all containers on machines with the same processor.
ENV OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE NUMBA_CACHE_DIR=/opt/numba
RUN mkdir -m 1777 /opt/numba && python -m minikv doctor && chmod -R a+rwX /opt/numba

USER 1000
WORKDIR /home/reader
EXPOSE 8888
CMD ["sh", "-c", "minikv start --no-lab course && exec jupyter lab --ip=0.0.0.0 --no-browser --ServerApp.root_dir=$HOME/course"]
