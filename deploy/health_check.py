"""Asks a service how it is: exit code 0 where it serves. For the health checks of containers.

python health_check.py HOST:PORT, of its gRPC server. grpc.health.v1 follows progress: what hangs does not serve.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def is_serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(not is_serving(sys.argv[1]))
