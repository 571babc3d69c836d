# The demo in a container: docker build --tag fairseq-posenc . && docker run fairseq-posenc
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
# torch without CUDA, which takes 5 GB less.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /fairseq_posenc
COPY . .
RUN make install
CMD ["make", "demo"]
