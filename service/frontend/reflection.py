"""Server reflection, v1 and v1alpha: both have the same messages on the wire, in packages of different names."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA = "grpc.reflection.v1alpha"
V1 = "grpc.reflection.v1"


def add_reflection(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    """Describe the named services, and reflection itself, to clients of either version."""
    _define_v1()
    names = [*service_names, *(f"{package}.ServerReflection" for package in (V1, V1ALPHA))]
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(f"{package}.ServerReflection", {"ServerReflectionInfo": handler})
            for package in (V1, V1ALPHA)
        )
    )


def _define_v1() -> None:
    """Add the descriptors of v1, made from those of v1alpha, to the pool that reflection answers from."""
    pool = descriptor_pool.Default()
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = "grpc/reflection/v1/reflection.proto", V1
    file.ClearField("options")
    for message in file.message_type:
        for field in message.field:
            if field.HasField("type_name"):
                field.type_name = field.type_name.replace(f".{V1ALPHA}.", f".{V1}.")
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(f".{V1ALPHA}.", f".{V1}.")
        method.output_type = method.output_type.replace(f".{V1ALPHA}.", f".{V1}.")
    pool.AddSerializedFile(file.SerializeToString())
