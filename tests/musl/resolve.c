/* Prints the addresses of a name, one a line, by the resolver of the C library: `resolve NAME`.
 * Exits with 2 if the name does not resolve, as getent does. Tests build it with musl-gcc. */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <sys/socket.h>

int main(int count, char **arguments)
{
	struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM }, *found, *one;
	char text[INET6_ADDRSTRLEN];
	int error;

	if (count != 2)
		return 1;
	error = getaddrinfo(arguments[1], NULL, &hints, &found);
	if (error) {
		fprintf(stderr, "%s: %s\n", arguments[1], gai_strerror(error));
		return 2;
	}
	for (one = found; one; one = one->ai_next) {
		const void *address = one->ai_family == AF_INET
			? (const void *)&((struct sockaddr_in *)one->ai_addr)->sin_addr
			: (const void *)&((struct sockaddr_in6 *)one->ai_addr)->sin6_addr;

		if (!inet_ntop(one->ai_family, address, text, sizeof(text)))
			return 1;
		puts(text);
	}
	return 0;
}
