# Prometheus from the distribution's package, where no registry with prom/prometheus can be reached:
#
#   docker build -f deploy/prometheus.Dockerfile -t hisparse-pd-prometheus .
#   PROMETHEUS_IMAGE=hisparse-pd-prometheus docker-compose -f docker-compose.yml -f compose.monitoring.yml up -d
ARG BASE_IMAGE=debian:bookworm-slim
FROM ${BASE_IMAGE}
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends prometheus \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir /prometheus && chown 65534:65534 /prometheus
USER 65534:65534
VOLUME /prometheus
ENTRYPOINT ["prometheus"]
