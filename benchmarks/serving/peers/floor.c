/* An HTTP/1.1 server that shows the minimum cost of a request, which is the cost of the operating system. Its one
   thread reads each POST completely, runs no model, and sends an answer that is as long as that of a small model.

   cc -O2 -o floor floor.c && ./floor PORT */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST = 1024, ROOM = 1 << 20, BODY = 217 };

struct connection {
  char *bytes;
  size_t held;
};

static struct connection connections[MOST];
static char answer[512];
static size_t answer_size;

static void listen_on(int epoll, int port, int *server) {
  int yes = 1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  *server = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(*server, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(*server, (struct sockaddr *)&address, sizeof address) || listen(*server, 128)) {
    perror("listen");
    exit(1);
  }
  struct epoll_event event = {.events = EPOLLIN, .data.fd = *server};
  epoll_ctl(epoll, EPOLL_CTL_ADD, *server, &event);
}

static void welcome(int epoll, int server) {
  int yes = 1, client = accept4(server, NULL, NULL, SOCK_NONBLOCK);
  if (client < 0) return;
  if (client >= MOST) {
    close(client);
    return;
  }
  setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  if (!connections[client].bytes) connections[client].bytes = malloc(ROOM);
  connections[client].held = 0;
  struct epoll_event event = {.events = EPOLLIN, .data.fd = client};
  epoll_ctl(epoll, EPOLL_CTL_ADD, client, &event);
}

/* Return the length of the whole request according to its head; 0 if the head is incomplete. */
static size_t wanted(struct connection *one) {
  char *end = memmem(one->bytes, one->held, "\r\n\r\n", 4);
  if (!end) return 0;
  *end = 0;
  char *length = strcasestr(one->bytes, "content-length:");
  *end = '\r';
  return (size_t)(end - one->bytes) + 4 + (length ? strtoul(length + 15, NULL, 10) : 0);
}

static void serve(int client) {
  struct connection *one = &connections[client];
  ssize_t came = read(client, one->bytes + one->held, ROOM - 1 - one->held);
  if (came <= 0) {
    close(client);
    return;
  }
  one->held += (size_t)came;
  size_t whole = wanted(one);
  if (!whole || one->held < whole) return;
  one->held = 0;
  if (write(client, answer, answer_size) < 0) close(client);
}

int main(int count, char **arguments) {
  if (count != 2) return 2;
  char body[BODY + 1];
  memset(body, 'x', BODY);
  body[BODY] = 0;
  answer_size = (size_t)snprintf(answer, sizeof answer,
      "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", BODY, body);
  int epoll = epoll_create1(0), server;
  listen_on(epoll, atoi(arguments[1]), &server);
  struct epoll_event ready[64];
  for (;;) {
    int many = epoll_wait(epoll, ready, 64, -1);
    for (int k = 0; k < many; k++) {
      if (ready[k].data.fd == server)
        welcome(epoll, server);
      else
        serve(ready[k].data.fd);
    }
  }
}
