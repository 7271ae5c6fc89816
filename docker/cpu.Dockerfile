# docker build -f docker/cpu.Dockerfile -t meseta:cpu . && docker run --rm -v "$PWD:/data" meseta:cpu train --data clicks.csv
FROM python:3.13-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

FROM python:3.13-slim
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
WORKDIR /data
ENTRYPOINT ["meseta"]
