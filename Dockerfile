# headcount with PyTorch for a CPU, or for an NVIDIA GPU (its driver and the NVIDIA Container Toolkit on the host suffice):
#   docker build -t headcount .
#   docker build --build-arg PYTORCH=cu128 -t headcount:cuda .
#   docker run --rm -v "$PWD:/data" headcount fit data.csv --out model
#   docker run --rm --gpus all -v "$PWD:/data" headcount:cuda fit data.csv --out model
FROM python:3.13-slim-bookworm
ARG PYTORCH=cpu
ARG EXTRAS=slides,onnx
WORKDIR /build
COPY constraints.txt LICENSE README.md pyproject.toml ./
COPY src src
RUN pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${PYTORCH}" "$(grep -E '^torch==' constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]" \
    && rm -rf /build
RUN useradd --create-home headcount && mkdir /cache && chown headcount /cache
USER headcount
ENV HEADCOUNT_DATA=/cache
VOLUME /cache
WORKDIR /data
ENTRYPOINT ["headcount"]
CMD ["--help"]
