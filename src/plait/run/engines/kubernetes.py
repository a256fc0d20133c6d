"""A manifest for Kubernetes: a headless Service and an Indexed Job. It was never tried on a cluster.

In: a request. Out: YAML. Each pod is a task and starts its host's ranks; the token is a Secret that the user makes.
"""

import json
import re

from plait.errors import UsageError
from plait.run.engines.request import Request


def manifest(request: Request, name: str) -> str:
    """What `kubectl apply -f -` is given."""
    options = request.known("image", "secret", "cpu", "memory", "gpus")
    name = re.sub("[^a-z0-9-]+", "-", name.lower()).strip("-")[:40].strip("-")
    name = name if name[:1].isalpha() else f"plait-{name}".strip("-")  # a Service begins with a letter
    if "image" not in options:
        raise UsageError(
            "kubernetes needs an image with plait and the job.", fix="--engine-set image=NAME:TAG."
        )
    limits = {
        "cpu": options.get("cpu"),
        "memory": options.get("memory"),
        "nvidia.com/gpu": options.get("gpus"),
    }
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    secret = {"secretKeyRef": {"name": options.get("secret", f"{name}-token"), "key": "token"}}
    environment = [
        {"name": "PLAIT_ENGINE", "value": "kubernetes"},
        {"name": "PLAIT_TASKS", "value": str(request.hosts)},
        {"name": "PLAIT_TASK", "valueFrom": index},
        {"name": "PLAIT_FIRST_ADDRESS", "value": f"{name}-0.{name}"},
        {"name": "PLAIT_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "PLAIT_TOKEN", "valueFrom": secret},
    ]
    container = {
        "name": "plait",
        "image": options["image"],
        "command": ["plait", *request.arguments],
        "env": environment,
        "resources": {"limits": {key: value for key, value in limits.items() if value}},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}},
    }
    pod = {"subdomain": name, "restartPolicy": "Never", "containers": [container]}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": request.hosts,
            "parallelism": request.hosts,
            "backoffLimit": 0,
            "template": {"spec": pod},
        },
    }
    return "\n---\n".join(json.dumps(part, indent=2) for part in (service, job)) + "\n"
