"""RabbitMQ streams: producers at leaders, consumers at replicas, behind any load balancer."""
