# hvd_adaptive with stock Horovod, for CPUs: docker build --tag hvd-adaptive .
#
#   docker run --rm hvd-adaptive hvd-adaptive doctor
#   docker run --rm --volume "$PWD:/work" hvd-adaptive mpirun -np 2 python train.py
#
# The last stage runs `doctor`, so that an image whose ranks cannot exchange gradients is not built.
# Build arguments: PYTHON, the version; INDEX, an index of packages with the torch that you want.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS built
ARG INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY setup.cfg setup.py pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY hvd_adaptive hvd_adaptive
RUN python -m venv "$VIRTUAL_ENV" \
    && pip install --constraint requirements/constraints.txt setuptools wheel \
    && pip install --constraint requirements/constraints.txt --extra-index-url "$INDEX" \
        --no-build-isolation '.[horovod,report]' \
    && hvd-adaptive install-horovod

FROM python:${PYTHON}-slim-bookworm
COPY --from=built /opt/venv /opt/venv
# Compiled kernels are kept in a folder that every user of a container can write.
ENV PATH=/opt/venv/bin:$PATH \
    NUMBA_CACHE_DIR=/var/cache/hvd-adaptive \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_btl_vader_single_copy_mechanism=none
RUN mkdir --mode=1777 "$NUMBA_CACHE_DIR" && hvd-adaptive doctor
WORKDIR /work
CMD ["hvd-adaptive", "doctor"]
