"""Writes pytorchjob.schema.json, an excerpt of the published schema of a PyTorchJob.

    pip install kubeflow-training==1.9.4 && python tests/hosts/pytorchjob_schema.py

The classes of `kubeflow.training` and `kubernetes.client`, both under Apache-2.0, are generated from the OpenAPI
specifications of the training operator and of Kubernetes. The excerpt has all fields of `CLASSES`. Fields of other
classes are not checked.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kubeflow.training import models
from kubernetes import client

CLASSES = (
    "KubeflowOrgV1PyTorchJob", "KubeflowOrgV1PyTorchJobSpec", "KubeflowOrgV1ElasticPolicy", "KubeflowOrgV1RunPolicy",
    "KubeflowOrgV1ReplicaSpec", "V1ObjectMeta", "V1PodTemplateSpec", "V1PodSpec", "V1Container", "V1ContainerPort",
    "V1EnvVar", "V1VolumeMount", "V1ResourceRequirements", "V1Volume", "V1PersistentVolumeClaimVolumeSource",
    "V1EmptyDirVolumeSource", "V1SecretVolumeSource", "V1ConfigMapVolumeSource", "V1HostPathVolumeSource",
)  # fmt: skip
TYPES = {"str": "string", "int": "integer", "bool": "boolean", "float": "number"}
QUANTITY = {"type": ["string", "number"]}
"""Schema of an amount of a resource, such as 500m or 2."""


def of_type(name: str, key: str) -> dict[str, Any]:
    """Return the schema of a value with a type such as 'dict(str, str)'."""
    if match := re.fullmatch(r"list\[(.*)\]", name):
        return {"type": "array", "items": of_type(match[1], key)}
    if match := re.fullmatch(r"dict\(str, (.*)\)", name):
        # Amounts are strings for the Python client, which writes them, but may be numbers.
        value = QUANTITY if key in ("limits", "requests") else of_type(match[1], key)
        return {"type": "object", "additionalProperties": value}
    if name in TYPES:
        return {"type": TYPES[name]}
    return {"$ref": f"#/$defs/{name}"} if name in CLASSES else {}


def of_class(name: str) -> dict[str, Any]:
    """Return the schema of an object: its keys are those of the class, and some are required."""
    model = getattr(models, name, None) or getattr(client, name)
    keys, types = model.attribute_map, model.openapi_types
    required = [
        keys[attribute]
        for attribute in types
        if "must not be `None`" in inspect.getsource(getattr(model, attribute).fset)
    ]
    properties = {keys[attribute]: of_type(types[attribute], keys[attribute]) for attribute in types}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def main() -> None:
    """Write the schema next to this script."""
    sources = ", ".join(f"{name} {version(name)} (Apache-2.0)" for name in ("kubeflow-training", "kubernetes"))
    schema = {
        "$comment": f"Written by pytorchjob_schema.py from the classes of {sources}.",
        "$ref": f"#/$defs/{CLASSES[0]}",
        "$defs": {name: of_class(name) for name in CLASSES},
    }
    lines = json.dumps(schema, indent=1)
    Path(__file__).with_name("pytorchjob.schema.json").write_text(f"{lines}\n")


if __name__ == "__main__":
    main()
