use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;
use http::Request;
use kube::client::Body;
use tokio::time::{Instant, sleep_until};
use tower::Service;

/// Minimum time between the starts of two watches with the same path.
const APART: Duration = Duration::from_secs(1);

/// Delays watches that would start too soon after each other. When a watch ends, even right after its start, the
/// library (kube-runtime) restarts it without a pause.
#[derive(Clone, Debug)]
pub(super) struct Paced<S> {
    inner: S,
    /// When the newest watch of each API path begins, or has begun.
    begins: Arc<Mutex<BTreeMap<String, Instant>>>,
}

impl<S> Paced<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, begins: Arc::default() }
    }

    /// The earliest time at which the request may be sent: for a watch, [`APART`] after the newest watch of this path
    /// begins; for other requests, now. Records a watch as the newest one of its path.
    fn begin(&self, request: &Request<Body>) -> Instant {
        let now = Instant::now();
        let uri = request.uri();
        if !uri.query().is_some_and(|query| query.split('&').any(|pair| pair == "watch=true")) {
            return now;
        }
        let mut begins = self.begins.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = begins.get(uri.path()).map_or(now, |last| now.max(*last + APART));
        begins.insert(uri.path().to_owned(), begin);
        begin
    }
}

impl<S> Service<Request<Body>> for Paced<S>
where
    S: Service<Request<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let begin = self.begin(&request);
        // The inner service sends the request only when `answer` is polled.
        let answer = self.inner.call(request);
        Box::pin(async move {
            sleep_until(begin).await;
            answer.await
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(uri: &str) -> Request<Body> {
        Request::get(uri).body(Body::empty()).unwrap()
    }

    #[test]
    fn only_watches_of_the_same_path_are_delayed() {
        let paced = Paced::new(());
        let (watch, list) = ("/api/v1/services?labelSelector=x&watch=true", "/api/v1/services?limit=200");
        let first = paced.begin(&request(watch));
        assert!(paced.begin(&request(list)) < first + APART);
        assert!(paced.begin(&request("/api/v1/nodes?watch=true")) < first + APART);
        assert_eq!(paced.begin(&request(watch)), first + APART);
    }
}
