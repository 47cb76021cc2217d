//! Server-sent events, whole, out of the pieces of a stream.

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;

use crate::cluster::{BodyStream, Lost};

/// The events of a worker's stream.
pub(super) struct Events {
    pieces: BodyStream,
    received: BytesMut,
    /// Bytes of `received` in which no event ends.
    searched: usize,
}

impl Events {
    pub(super) fn new(pieces: BodyStream) -> Events {
        Events { pieces, received: BytesMut::new(), searched: 0 }
    }

    /// The next event, or comment, with the blank line that ends it; none at the end of the stream.
    ///
    /// # Errors
    /// If the worker is lost, or the stream ends within an event.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Lost> {
        loop {
            let unsearched = &self.received[self.searched..];
            if let Some(at) = unsearched.windows(2).position(|pair| pair == b"\n\n") {
                let event = self.received.split_to(self.searched + at + 2).freeze();
                self.searched = 0;
                return Ok(Some(event));
            }
            self.searched = self.received.len().saturating_sub(1);
            match self.pieces.next().await {
                Some(piece) => self.received.extend_from_slice(&piece?),
                None if self.received.is_empty() => return Ok(None),
                None => return Err(Lost("its stream ended within an event".to_owned())),
            }
        }
    }
}

/// The data of an event; none for a comment.
pub(super) fn data(event: &[u8]) -> Option<&[u8]> {
    let mut lines = event.split(|byte| *byte == b'\n');
    lines.find_map(|line| line.strip_prefix(b"data:")).map(<[u8]>::trim_ascii)
}

/// An event with other data.
pub(super) fn with_data(event: &[u8], data: &str) -> Bytes {
    let is_other = |line: &&[u8]| !line.is_empty() && !line.starts_with(b"data:");
    let mut bytes = BytesMut::new();
    for line in event.split(|byte| *byte == b'\n').filter(is_other) {
        bytes.extend_from_slice(line);
        bytes.extend_from_slice(b"\n");
    }
    bytes.extend_from_slice(format!("data: {data}\n\n").as_bytes());
    bytes.freeze()
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    #[tokio::test]
    async fn events_are_whole_however_their_bytes_come() {
        let events = [": comment\n\n", "data: {\"a\": 1}\n\n", "event: b\ndata: {\"c\":\"\\n\"}\n\n"];
        let text = events.concat();
        for size in 1..=text.len() {
            let pieces: Vec<_> =
                text.as_bytes().chunks(size).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
            let mut read = Events::new(stream::iter(pieces).boxed());
            for event in events {
                assert_eq!(read.next().await.unwrap().unwrap(), event, "{size}");
            }
            assert_eq!(read.next().await.unwrap(), None);
        }
        let cut = stream::iter([Ok(Bytes::from_static(b"data: 1\n\ndata: 2\n"))]).boxed();
        let mut read = Events::new(cut);
        assert_eq!(read.next().await.unwrap().unwrap(), "data: 1\n\n");
        assert!(read.next().await.is_err());
    }

    #[test]
    fn the_data_of_an_event_is_found() {
        for (event, wanted) in [
            (": comment\n\n", None),
            ("data: 1\n\n", Some("1")),
            ("event: x\ndata:{\"data\": 2}\n\n", Some("{\"data\": 2}")),
        ] {
            assert_eq!(data(event.as_bytes()), wanted.map(str::as_bytes), "{event}");
        }
    }
}
