//! Requests like those of a real server: a few documents are requested most, and some clients leave.

use std::io::{BufRead, BufReader};
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Share of the documents that gets [`HOT`] of the requests (RAGCache, arXiv 2404.12457, figure 5).
pub(super) const FEW: f64 = 0.03;
pub(super) const HOT: f64 = 0.6;

/// Pause before the server is asked for its memory.
const REST: Duration = Duration::from_secs(2);

/// The outcome of a request.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    /// Of the answer; 0 where there was none.
    pub(super) status: u16,
    /// Seconds to the first token, and between the others.
    pub(super) ttft: Option<f64>,
    pub(super) gaps: Vec<f64>,
    pub(super) tokens: usize,
    pub(super) whole: bool,
    pub(super) left: bool,
}

/// The traffic of a benchmark.
pub(super) struct Traffic {
    pub(super) url: String,
    pub(super) ids: Vec<String>,
    /// Up to each document, the share of requests that want it or one before.
    pub(super) shares: Vec<f64>,
    pub(super) questions: Vec<String>,
    pub(super) per_request: RangeInclusive<usize>,
    pub(super) tokens: usize,
    /// Share of clients that go away before the answer ends.
    pub(super) leave: f64,
    pub(super) seed: u64,
    pub(super) drawn: AtomicU64,
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

impl Traffic {
    /// A number from 0 to 1, the next of a sequence.
    fn random(&self) -> f64 {
        let mut x = self.drawn.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub(super) fn body(&self, method: &str, evict: &str, index: usize) -> String {
        let mut chosen: Vec<usize> = Vec::new();
        let (least, most) = (*self.per_request.start(), *self.per_request.end());
        let wanted = least + (self.random() * (most - least + 1) as f64) as usize;
        while chosen.len() < wanted.min(self.ids.len()) {
            let at = self.random();
            let document = self.shares.partition_point(|share| *share < at).min(self.ids.len() - 1);
            if !chosen.contains(&document) {
                chosen.push(document);
            }
        }
        let documents: Vec<Value> =
            chosen.iter().map(|document| json!({ "id": self.ids[*document] })).collect();
        let question = &self.questions[index % self.questions.len()];
        json!({
            "messages": [{ "role": "user", "content": question }], "documents": documents, "stream": true,
            "max_tokens": self.tokens, "min_tokens": self.tokens, "refrain": { "method": method, "evict": evict },
        })
        .to_string()
    }

    /// Outcomes of `clients` clients during `time`, each of which asks again as soon as it is answered.
    pub(super) fn closed(
        &self,
        clients: usize,
        time: Duration,
        body: &(dyn Fn(usize) -> String + Sync),
    ) -> Vec<Outcome> {
        let outcomes = Mutex::new(Vec::new());
        let (until, next) = (Instant::now() + time, AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..clients {
                scope.spawn(|| {
                    while Instant::now() < until {
                        let outcome = self.ask(&body(next.fetch_add(1, Relaxed) as usize));
                        outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(outcome);
                    }
                });
            }
        });
        outcomes.into_inner().unwrap_or_default()
    }

    /// Resets the random draws, so that every method gets equal requests.
    pub(super) fn begin_again(&self) {
        self.drawn.store(self.seed, Relaxed);
    }

    /// Outcomes of requests that arrive at random (Poisson) at `rate` a second, whether others are answered or not.
    /// Requests, their order and their gaps, scaled by the rate, are equal each time.
    pub(super) fn open(
        &self,
        rate: f64,
        requests: usize,
        body: &(dyn Fn(usize) -> String + Sync),
    ) -> Vec<Outcome> {
        self.begin_again();
        let mut at = 0.0;
        let mut come = |index| {
            at += -(1.0 - self.random()).ln() / rate;
            (Duration::from_secs_f64(at), body(index))
        };
        let come: Vec<(Duration, String)> = (0..requests).map(&mut come).collect();
        let (outcomes, began) = (Mutex::new(Vec::new()), Instant::now());
        thread::scope(|scope| {
            for (at, text) in come {
                thread::sleep((began + at).saturating_duration_since(Instant::now()));
                let outcomes = &outcomes;
                scope.spawn(move || {
                    let outcome = self.ask(&text);
                    outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(outcome);
                });
            }
        });
        outcomes.into_inner().unwrap_or_default()
    }

    /// Bytes of the server's memory, a while after its last answer.
    pub(super) fn memory(&self) -> Option<u64> {
        thread::sleep(REST);
        let mut response = ureq::get(format!("{}/metrics", self.url)).call().ok()?;
        let text = response.body_mut().read_to_string().ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("process_resident_memory_bytes "))?;
        line.trim().parse::<f64>().ok().map(|bytes| bytes as u64)
    }

    fn ask(&self, body: &str) -> Outcome {
        let leaves = self.random() < self.leave;
        let most = if leaves { 1 + (self.random() * self.tokens as f64) as usize } else { usize::MAX };
        let started = Instant::now();
        let agent = ureq::Agent::config_builder()
            .timeout_global(None)
            .http_status_as_error(false)
            .build()
            .new_agent();
        let url = format!("{}/v1/chat/completions", self.url);
        let Ok(response) = agent.post(url).content_type("application/json").send(body) else {
            return Outcome::default();
        };
        let mut outcome = Outcome { status: response.status().as_u16(), ..Outcome::default() };
        if outcome.status != 200 {
            return outcome;
        }
        let (mut last, mut broken) = (started, false);
        for line in BufReader::new(response.into_body().into_reader()).lines().map_while(std::io::Result::ok)
        {
            let Some(data) = line.strip_prefix("data: ") else { continue };
            // An error comes before the end as well.
            broken |= data.starts_with("{\"error\"");
            outcome.whole |= data == "[DONE]" && !broken;
            // Every token has an event of its own but where a character takes several.
            if data.contains("\"retained\"") && !data.contains("\"stats\"") {
                let now = Instant::now();
                match outcome.ttft {
                    None => outcome.ttft = Some((now - started).as_secs_f64()),
                    Some(_) => outcome.gaps.push((now - last).as_secs_f64()),
                }
                last = now;
                outcome.tokens += 1;
                if outcome.tokens >= most {
                    outcome.left = true;
                    return outcome;
                }
            }
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
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
}
