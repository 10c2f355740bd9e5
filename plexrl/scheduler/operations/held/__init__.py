"""Operations that wait for storage or for memory that other processes hold."""
