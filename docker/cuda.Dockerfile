# docker build -f docker/cuda.Dockerfile -t meseta:cuda . && docker run --rm --gpus all -v "$PWD:/data" meseta:cuda doctor
FROM python:3.13-slim
# Triton compiles with gcc at run time.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch
COPY . /src
RUN pip install --no-cache-dir /src && rm -rf /src
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /data
ENTRYPOINT ["meseta"]
