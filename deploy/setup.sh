#!/bin/sh
# Writes deploy/.env and the keys below deploy/secrets. What is there is kept, so it can be run again.
#
# Keys are made by `hisparse-pd keygen`: of HISPARSE_PD when that is set, of the checkout's .venv or the PATH, else of
# the image, which is built first, as .env says. The directory is closed to other users; the files in it are not,
# because the users of the containers, which get one file each, must read them.
set -eu
cd "$(dirname "$0")"

test -e .env || cp .env.example .env
mkdir -p secrets
chmod 0700 secrets

value() { # name in .env
    sed -n "s/^$1=//p" .env | tail -n 1
}

compose() {
    if docker compose version >/dev/null 2>&1; then docker compose "$@"; else docker-compose "$@"; fi
}

keygen() { # file below secrets/, further options
    if test -n "${HISPARSE_PD:-}"; then
        $HISPARSE_PD keygen "secrets/$1" $2
    elif test -x ../.venv/bin/hisparse-pd; then
        ../.venv/bin/hisparse-pd keygen "secrets/$1" $2
    elif command -v hisparse-pd >/dev/null; then
        hisparse-pd keygen "secrets/$1" $2
    else
        image="$(value IMAGE):$(value DEVICE)"
        docker image inspect "$image" >/dev/null 2>&1 || compose build prefill
        docker run --rm --network none --user "$(id -u):$(id -g)" -v "$PWD/secrets:/secrets" \
            "$image" keygen "/secrets/$1" $2
    fi
}

test -e secrets/control.key || keygen control.key ""
test -e secrets/api.key || keygen api.key --api
test -e secrets/node_api.key || keygen node_api.key --api
test -e secrets/grafana.password || {
    keygen grafana.password --api >/dev/null
    echo "wrote secrets/grafana.password; Grafana's user is admin"
}
chmod 0444 secrets/*
