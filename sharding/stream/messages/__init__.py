"""What is inside chunks: entries, compression, AMQP 1.0 messages. Pure."""
