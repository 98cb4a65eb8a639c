"""Other clouds' GPU types and prices, to compare with AWS's plans; read only on request."""
