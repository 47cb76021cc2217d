//! The stream of a connection, which notices clients that take nothing and clients that have left.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Most bytes that are read ahead of a connection's requests.
const MAX_AHEAD: usize = 16 << 10;

/// A client's stream. Writes time out: a client that reads nothing would hold its connection for ever. A clone is the same stream.
///
/// While a request is answered, its connection reads nothing as long as bytes behind the request are there already, and so would not see the end of
/// the stream. Such bytes are read ahead.
pub(crate) struct ClientStream<S>(Arc<Mutex<Inner<S>>>);

struct Inner<S> {
    stream: S,
    limit: Duration,
    /// Runs while a write is pending.
    timer: Option<Pin<Box<Sleep>>>,
    /// Bytes that were read ahead.
    ahead: Vec<u8>,
    /// Whether the connection waits for bytes by itself.
    is_read: bool,
}

/// The outcome of reading ahead.
pub(crate) enum ReadAhead {
    /// Bytes are there, for which the connection may wait.
    Bytes,
    /// The client has closed its stream, or it has failed.
    End,
}

impl<S> Clone for ClientStream<S> {
    fn clone(&self) -> Self {
        ClientStream(self.0.clone())
    }
}

impl<S> ClientStream<S> {
    /// A stream whose writes may be pending for `limit`.
    pub(crate) fn new(stream: S, limit: Duration) -> ClientStream<S> {
        let (timer, ahead, is_read) = (None, Vec::new(), false);
        ClientStream(Arc::new(Mutex::new(Inner { stream, limit, timer, ahead, is_read })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner<S>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: AsyncRead + Unpin> ClientStream<S> {
    /// Reads ahead, unless the connection waits for bytes by itself, or enough are there.
    pub(crate) fn poll_read_ahead(&self, context: &mut Context<'_>) -> Poll<ReadAhead> {
        let mut inner = self.inner();
        let room = MAX_AHEAD.saturating_sub(inner.ahead.len());
        if inner.is_read || room == 0 {
            return Poll::Pending;
        }
        let mut bytes = [0; 1024];
        let mut into = ReadBuf::new(&mut bytes[..room.min(1024)]);
        match Pin::new(&mut inner.stream).poll_read(context, &mut into) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(())) if !into.filled().is_empty() => {
                inner.ahead.extend_from_slice(into.filled());
                Poll::Ready(ReadAhead::Bytes)
            }
            Poll::Ready(_) => Poll::Ready(ReadAhead::End),
        }
    }
}

impl<S> Inner<S> {
    /// Passes on the outcome of a write, and fails one that has been pending for too long.
    fn timed<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let limit = self.limit;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        timer.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut inner = self.inner();
        if !inner.ahead.is_empty() {
            let most = into.remaining().min(inner.ahead.len());
            into.put_slice(&inner.ahead[..most]);
            inner.ahead.drain(..most);
            return Poll::Ready(Ok(()));
        }
        let read = Pin::new(&mut inner.stream).poll_read(context, into);
        inner.is_read = read.is_pending();
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut inner = self.inner();
        let written = Pin::new(&mut inner.stream).poll_write(context, bytes);
        inner.timed(context, written)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.inner();
        let written = Pin::new(&mut inner.stream).poll_flush(context);
        inner.timed(context, written)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.inner();
        let written = Pin::new(&mut inner.stream).poll_shutdown(context);
        inner.timed(context, written)
    }
}
