//! Requests like those of a real server: a few documents are requested most, and some clients leave.

use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use refrain::engine::Document;
use serde_json::{Value, json};

use super::client::{Kind, Outcome, Request, tool};
use super::host::Target;
use crate::args::Scenario;

/// Share of the documents that gets [`HOT`] of the requests (RAGCache, arXiv 2404.12457, figure 5).
pub(super) const FEW: f64 = 0.03;
pub(super) const HOT: f64 = 0.6;

/// The instruction by which an answer copies a passage.
const QUOTE: &str = "Quote the passage that answers this word for word, with the sentences around it:";
/// Fewest tokens of an answer that copies.
const FEWEST_COPIED: usize = 64;
/// Fewest tokens that the call of a tool may take.
const CALL_TOKENS: usize = 64;

/// The traffic of a benchmark.
pub(super) struct Traffic {
    pub(super) scenario: Scenario,
    pub(super) documents: Vec<Document>,
    /// Up to each document, the share of requests that want it or one before.
    pub(super) shares: Vec<f64>,
    pub(super) questions: Vec<String>,
    pub(super) per_request: RangeInclusive<usize>,
    pub(super) tokens: usize,
    /// Questions of a conversation.
    pub(super) turns: usize,
    /// Share of clients that go away before the answer ends.
    pub(super) leave: f64,
    /// Shares of requests that are ingests, and that have a tool called.
    pub(super) ingest: f64,
    pub(super) tools: f64,
    pub(super) evict: String,
    pub(super) seed: u64,
    pub(super) drawn: AtomicU64,
    /// Whether measurements share a server that runs already, whose prefix cache knows the requests of those before.
    pub(super) shares_server: bool,
}

/// Cumulative shares of requests of `n` documents: by Zipf's law, with the exponent that gives the first `few` of
/// them `hot` of all requests.
pub(super) fn shares(n: usize, few: f64, hot: f64) -> Vec<f64> {
    let cumulative = |exponent: f64| {
        let mut sum = 0.0;
        let sums: Vec<f64> = (1..=n)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        sums.into_iter().map(|up_to| up_to / sum).collect::<Vec<f64>>()
    };
    let first = ((few * n as f64).round() as usize).max(1);
    let (mut low, mut high) = (0.0, 8.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        let share = cumulative(middle).get(first - 1).copied().unwrap_or(1.0);
        if share < hot { low = middle } else { high = middle }
    }
    cumulative(low)
}

/// A question that nobody has asked before, as those of people are: the prefix cache would know the answers to all of a short list.
fn numbered(number: u64, question: &str) -> String {
    format!("({number}) {question}")
}

impl Traffic {
    /// A number from 0 to 1, the next of a sequence.
    fn random(&self) -> f64 {
        let mut x = self.drawn.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Indices of the documents of a request.
    fn chosen(&self) -> Vec<usize> {
        let mut chosen: Vec<usize> = Vec::new();
        let (least, most) = (*self.per_request.start(), *self.per_request.end());
        let wanted = least + (self.random() * (most - least + 1) as f64) as usize;
        while chosen.len() < wanted.min(self.shares.len()) {
            let at = self.random();
            let document = self.shares.partition_point(|share| *share < at).min(self.shares.len() - 1);
            if !chosen.contains(&document) {
                chosen.push(document);
            }
        }
        chosen
    }

    fn leaves_after(&self) -> Option<usize> {
        let leaves = self.random() < self.leave;
        leaves.then(|| 1 + (self.random() * self.tokens as f64) as usize)
    }

    /// A chat over documents.
    fn chat(&self, target: &Target, method: &str, key: usize, messages: &[Value], ids: &[usize]) -> Request {
        let documents: Vec<Value> =
            ids.iter().map(|document| json!({ "id": target.ids[key][*document] })).collect();
        let fewest = match self.scenario {
            // Answers end by themselves: one that is made to go on repeats itself, and that is easily foreseen.
            Scenario::Extractive => self.tokens.min(FEWEST_COPIED),
            Scenario::Mixed | Scenario::MultiTurn => self.tokens,
        };
        let body = json!({
            "messages": messages, "documents": documents, "stream": true, "stream_options": { "include_usage": true },
            "max_tokens": self.tokens, "min_tokens": fewest, "refrain": { "method": method, "evict": self.evict },
        });
        Request { body, key, leaves_after: self.leaves_after(), ..Request::default() }
    }

    /// A request that stands alone, the next of the sequence.
    fn single(&self, target: &Target, method: &str, key: usize, (index, first): (usize, u64)) -> Request {
        let kind = self.random();
        if kind < self.ingest {
            return self.new_document(method, key, index);
        }
        let question = &self.questions[index % self.questions.len()];
        let number = first + index as u64;
        let question = match self.scenario {
            Scenario::Extractive => numbered(number, &format!("{QUOTE} {question}")),
            Scenario::Mixed | Scenario::MultiTurn => numbered(number, question),
        };
        let messages = [json!({ "role": "user", "content": question })];
        let mut request = self.chat(target, method, key, &messages, &self.chosen());
        if kind < self.ingest + self.tools {
            request.kind = Kind::Tools;
            let body = request.body.as_object_mut().into_iter();
            for body in body {
                body.remove("min_tokens");
                body.insert("max_tokens".to_owned(), self.tokens.max(CALL_TOKENS).into());
                body.insert("tools".to_owned(), json!([tool()]));
                body.insert("tool_choice".to_owned(), "required".into());
            }
        }
        request
    }

    /// The ingest of a document that the server does not have: one of the pool, with another beginning.
    fn new_document(&self, method: &str, key: usize, index: usize) -> Request {
        let from = &self.documents[(self.random() * self.documents.len() as f64) as usize];
        let number = (self.random() * 1e12) as u64;
        let text = format!("Note {number} of request {index}.\n\n{}", from.text);
        let document = json!({ "title": from.title, "text": text });
        let body = json!({ "documents": [document], "method": method, "stream": true });
        Request { kind: Kind::Ingest, body, key, leaves_after: self.leaves_after(), ..Request::default() }
    }

    /// A conversation over the same documents. One that fails, or whose client leaves, ends there; the end of the time ends none, since those
    /// that are cut short would have fewer of the later turns.
    fn converse(
        &self,
        target: &Target,
        method: &str,
        key: usize,
        (index, first): (usize, u64),
    ) -> Vec<Outcome> {
        let (chosen, mut messages, mut outcomes) = (self.chosen(), Vec::new(), Vec::new());
        for turn in 0..self.turns {
            let question = &self.questions[(index * self.turns + turn) % self.questions.len()];
            let question =
                if turn == 0 { numbered(first + index as u64, question) } else { question.clone() };
            messages.push(json!({ "role": "user", "content": question }));
            let request = self.chat(target, method, key, &messages, &chosen);
            let outcome = target.client(key).send(&Request { later: turn > 0, ..request });
            messages.push(json!({ "role": "assistant", "content": outcome.text }));
            let ends = !outcome.whole;
            outcomes.push(outcome);
            if ends {
                break;
            }
        }
        outcomes
    }

    /// Outcomes of `clients` clients during `time`, each of which asks again as soon as it is answered. Clients have the target's keys in turn.
    pub(super) fn closed(
        &self,
        target: &Target,
        method: &str,
        clients: usize,
        time: Duration,
    ) -> Vec<Outcome> {
        let first = self.begin_again();
        let outcomes = Mutex::new(Vec::new());
        let (until, next) = (Instant::now() + time, AtomicU64::new(0));
        thread::scope(|scope| {
            for client in 0..clients {
                let (outcomes, next, key) = (&outcomes, &next, client % target.keys.len());
                scope.spawn(move || {
                    while Instant::now() < until {
                        let place = (next.fetch_add(1, Relaxed) as usize, first);
                        let some = match self.scenario {
                            Scenario::MultiTurn => self.converse(target, method, key, place),
                            Scenario::Mixed | Scenario::Extractive => {
                                vec![target.client(key).send(&self.single(target, method, key, place))]
                            }
                        };
                        outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).extend(some);
                    }
                });
            }
        });
        outcomes.into_inner().unwrap_or_default()
    }

    /// Resets the random draws, so that every method gets equal requests, and gives the number of the first question. A server that has
    /// answered before gets other draws and numbers, those of the clock's microseconds: it has computed the same requests already.
    fn begin_again(&self) -> u64 {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64);
        let used = if self.shares_server { now() } else { 0 };
        self.drawn.store(self.seed.wrapping_add(used), Relaxed);
        used.wrapping_add(1)
    }

    /// Outcomes of requests that arrive at random (Poisson) at `rate` a second, whether others are answered or not.
    /// Requests, their order and their gaps, scaled by the rate, are equal each time for servers that have just begun.
    pub(super) fn open(&self, target: &Target, method: &str, rate: f64, requests: usize) -> Vec<Outcome> {
        let first = self.begin_again();
        let mut at = 0.0;
        let mut come = |index| {
            at += -(1.0 - self.random()).ln() / rate;
            let key = index % target.keys.len();
            (Duration::from_secs_f64(at), self.single(target, method, key, (index, first)))
        };
        let come: Vec<(Duration, Request)> = (0..requests).map(&mut come).collect();
        let (outcomes, began) = (Mutex::new(Vec::new()), Instant::now());
        thread::scope(|scope| {
            for (at, request) in come {
                thread::sleep((began + at).saturating_duration_since(Instant::now()));
                let outcomes = &outcomes;
                scope.spawn(move || {
                    let outcome = target.client(request.key).send(&request);
                    outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(outcome);
                });
            }
        });
        outcomes.into_inner().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;

    use super::super::host::{Host, Variant};
    use super::*;

    #[test]
    fn a_few_documents_get_most_requests() {
        for n in [100, 300, 1000] {
            let shares = shares(n, FEW, HOT);
            let few = (FEW * n as f64) as usize;
            assert!((shares[few - 1] - HOT).abs() < 0.01, "{n}: {}", shares[few - 1]);
            assert!(shares.is_sorted() && (shares[n - 1] - 1.0).abs() < 1e-9);
        }
        assert_eq!(shares(1, FEW, HOT), [1.0]);
    }

    /// Bodies of the requests of two measurements of a server that runs already, or of two that have just begun, in order.
    fn asked_twice(shares_server: bool) -> [Vec<String>; 2] {
        const REQUESTS: usize = 3;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let traffic = Traffic {
            scenario: Scenario::Mixed,
            documents: Vec::new(),
            shares: Vec::new(),
            questions: vec!["Which valve?".to_owned()],
            per_request: 0..=0,
            tokens: 4,
            turns: 2,
            leave: 0.0,
            ingest: 0.0,
            tools: 0.0,
            evict: "full".to_owned(),
            seed: 42,
            drawn: AtomicU64::new(42),
            shares_server,
        };
        let server = thread::spawn(move || {
            let answer = |_| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let (mut head, mut length) = (String::new(), 0);
                while head != "\r\n" {
                    head.clear();
                    assert!(reader.read_line(&mut head).unwrap() > 0, "it ended within the head");
                    let head = head.to_lowercase();
                    if let Some(bytes) = head.strip_prefix("content-length:") {
                        length = bytes.trim().parse().unwrap();
                    }
                }
                let mut body = vec![0; length];
                reader.read_exact(&mut body).unwrap();
                write!(stream, "HTTP/1.1 503 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
                String::from_utf8(body).unwrap()
            };
            (0..2 * REQUESTS).map(answer).collect::<Vec<String>>()
        });
        let target =
            Host::Running { url, keys: Vec::new() }.serve(Variant::default(), &["pie"], &[]).unwrap();
        for _ in 0..2 {
            assert_eq!(traffic.open(&target, "pie", 1e6, REQUESTS).len(), REQUESTS);
        }
        let mut first = server.join().unwrap();
        let mut second = first.split_off(REQUESTS);
        first.sort_unstable();
        second.sort_unstable();
        [first, second]
    }

    #[test]
    fn a_server_that_runs_already_is_asked_nothing_twice() {
        let [first, second] = asked_twice(true);
        assert!(first.iter().chain(&second).collect::<BTreeSet<_>>().len() == 6, "{first:?} {second:?}");
        let [first, second] = asked_twice(false);
        assert_eq!(first, second);
    }
}
