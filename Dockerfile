# headcount with PyTorch for a CPU, or for an NVIDIA GPU (its driver and the NVIDIA Container Toolkit on the host suffice):
#   docker build -t headcount .
#   docker build --build-arg PYTORCH_INDEX=https://pypi.org/simple -t headcount:cuda .
#   docker run --rm --user "$(id -u)" -v "$PWD:/data" headcount fit data.csv --out model
#   docker run --rm --user "$(id -u)" --gpus all -v "$PWD:/data" headcount:cuda fit data.csv --out model
FROM python:3.13-slim-bookworm
ARG PYTORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=slides,onnx
# compiled training (Triton on a GPU) calls a C++ compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY constraints.txt LICENSE README.md pyproject.toml ./
COPY src src
RUN pip install --no-cache-dir --index-url "${PYTORCH_INDEX}" "$(grep -E '^torch==' constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]" \
    && rm -rf /build
# any user may run it: files in /data are then the user's
RUN mkdir -m 1777 /cache
ENV HOME=/cache HEADCOUNT_DATA=/cache USER=headcount
USER 1000
WORKDIR /data
ENTRYPOINT ["headcount"]
CMD ["--help"]
