import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.List;

/** Send bodies to the URL with the JDK's default client, which offers h2c, and print statuses and answers. */
public class InferClient {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        byte[] body = arguments[1].getBytes();
        BodyPublisher chunked = BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body));
        for (BodyPublisher publisher : List.of(BodyPublishers.ofByteArray(body), chunked, chunked, BodyPublishers.ofByteArray(body))) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0])).POST(publisher).build();
            HttpResponse<String> response = client.send(request, BodyHandlers.ofString());
            System.out.println(response.statusCode() + " " + response.body());
        }
        HttpRequest waiting = HttpRequest.newBuilder(URI.create(arguments[0])).expectContinue(true).POST(BodyPublishers.ofByteArray(body)).build();
        HttpResponse<String> response = client.send(waiting, BodyHandlers.ofString());
        System.out.println(response.statusCode() + " " + response.body());
    }
}
