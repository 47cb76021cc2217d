//! The requests that come: when, and for which chunks. They depend on the scenario and its seed alone, so that every rule gets the same.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::scenario::{Amount, Popularity, Scenario};

/// A number from 0 to 1, without 1.
pub(crate) fn uniform(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
}

/// How often each chunk of the corpus is asked for.
#[derive(Debug)]
enum Draw {
    /// The first `few` chunks get `hot` of all requests, each as often as the others of its part.
    TwoLevel { few: u64, hot: f64 },
    /// Up to each chunk, the share of requests that ask for it or one before.
    Zipf(Vec<f64>),
}

/// Which chunks requests ask for.
#[derive(Debug)]
pub(crate) struct Corpus {
    chunks: u64,
    draw: Draw,
}

impl Corpus {
    pub(crate) fn new(scenario: &Scenario, workers: usize) -> Corpus {
        let chunks = scenario.corpus.of(workers).round() as u64;
        let few = ((scenario.few * chunks as f64).round() as u64).clamp(1, chunks);
        let draw = match scenario.popularity {
            Popularity::TwoLevel => Draw::TwoLevel { few, hot: scenario.hot },
            Popularity::Zipf => Draw::Zipf(zipf(chunks, few, scenario.hot)),
        };
        Corpus { chunks, draw }
    }

    /// The number of a chunk.
    fn draw(&self, rng: &mut ChaCha8Rng) -> u32 {
        let u = uniform(rng);
        let chunk = match &self.draw {
            // All chunks are hot, and each is drawn as often as any other.
            Draw::TwoLevel { few, .. } if *few == self.chunks => (u * *few as f64) as u64,
            Draw::TwoLevel { few, hot } if u < *hot => (u / hot * *few as f64) as u64,
            Draw::TwoLevel { few, hot } => {
                few + ((u - hot) / (1.0 - hot) * (self.chunks - few) as f64) as u64
            }
            Draw::Zipf(shares) => shares.partition_point(|share| *share <= u) as u64,
        };
        chunk.min(self.chunks - 1) as u32
    }
}

/// Sum of `rank^-exponent` up to `n`: terms up to a thousand, then their integral (Euler and Maclaurin).
fn harmonic(n: u64, exponent: f64) -> f64 {
    let exact = n.min(1000);
    let terms: f64 = (1..=exact).map(|rank| (rank as f64).powf(-exponent)).sum();
    if n == exact {
        return terms;
    }
    let (a, b) = (exact as f64, n as f64);
    let integral = if (exponent - 1.0).abs() < 1e-9 {
        (b / a).ln()
    } else {
        (b.powf(1.0 - exponent) - a.powf(1.0 - exponent)) / (1.0 - exponent)
    };
    terms + integral + (b.powf(-exponent) - a.powf(-exponent)) / 2.0
}

/// Cumulative shares of `n` chunks by Zipf's law, with the exponent that gives the first `few` of them `hot` of all requests.
fn zipf(n: u64, few: u64, hot: f64) -> Vec<f64> {
    let (mut low, mut high) = (0.0, 8.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if harmonic(few, middle) / harmonic(n, middle) < hot { low = middle } else { high = middle }
    }
    let mut sum = 0.0;
    let mut shares: Vec<f64> = (1..=n)
        .map(|rank| {
            sum += (rank as f64).powf(-low);
            sum
        })
        .collect();
    shares.iter_mut().for_each(|share| *share /= sum);
    shares
}

/// A request as it comes.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    /// Seconds since the beginning.
    pub(crate) time: f64,
    /// Different chunks of the corpus, by number.
    pub(crate) chunks: Vec<u32>,
    /// The gateway that gets it.
    pub(crate) gateway: usize,
    /// Seconds that computing and loading take / seconds by the worker's rates.
    pub(crate) slowness: f64,
}

/// The requests of a fleet, one after the other.
#[derive(Debug)]
pub(crate) struct Traffic<'a> {
    corpus: &'a Corpus,
    rng: ChaCha8Rng,
    /// Requests a second.
    rate: f64,
    per_request: usize,
    gateways: usize,
    jitter: f64,
    time: f64,
    left: u64,
}

impl<'a> Traffic<'a> {
    /// The requests of so many workers, at a rate.
    pub(crate) fn new(scenario: &Scenario, workers: usize, rate: Amount, corpus: &'a Corpus) -> Traffic<'a> {
        Traffic {
            corpus,
            rng: ChaCha8Rng::seed_from_u64(scenario.seed),
            rate: rate.of(workers),
            per_request: scenario.chunks.min(corpus.chunks as usize),
            gateways: scenario.gateways,
            jitter: scenario.jitter,
            time: 0.0,
            left: scenario.requests * workers as u64,
        }
    }
}

impl Iterator for Traffic<'_> {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        self.left = self.left.checked_sub(1)?;
        // Times between arrivals are exponential: the process is Poisson's.
        self.time -= (1.0 - uniform(&mut self.rng)).ln() / self.rate;
        let mut chunks = Vec::with_capacity(self.per_request);
        while chunks.len() < self.per_request {
            let chunk = self.corpus.draw(&mut self.rng);
            if !chunks.contains(&chunk) {
                chunks.push(chunk);
            }
        }
        let gateway = (uniform(&mut self.rng) * self.gateways as f64) as usize;
        let slowness = 1.0 + self.jitter * (2.0 * uniform(&mut self.rng) - 1.0);
        Some(Arrival { time: self.time, chunks, gateway, slowness })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::scenario;

    #[test]
    fn the_few_get_their_share_by_either_law() {
        for popularity in ["zipf", "two-level"] {
            let scenario =
                scenario(&["--popularity", popularity, "--few=0.03", "--hot=0.6", "--corpus=20000"]);
            let corpus = Corpus::new(&scenario, 10);
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            let mut counts = vec![0_u32; 20_000];
            (0..200_000).for_each(|_| counts[corpus.draw(&mut rng) as usize] += 1);
            let few: u32 = counts[..600].iter().sum();
            assert!((119_000..121_000).contains(&few), "{popularity}: {few} of 200000 for the first 600");
            // Zipf's law has a first one; in two levels all of the few are equal.
            let first = if popularity == "zipf" { 3000..20_000 } else { 150..260 };
            assert!(first.contains(&counts[0]), "{popularity}: {} for the first", counts[0]);
            assert!(
                counts[15_000..].iter().sum::<u32>() > 5000,
                "{popularity}: the last are asked for as well"
            );
        }
    }

    #[test]
    fn where_all_are_few_all_are_equal() {
        let scenario = scenario(&["--popularity", "two-level", "--few=0.98", "--hot=0.6", "--corpus=20"]);
        let corpus = Corpus::new(&scenario, 10);
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut counts = vec![0_u32; 20];
        (0..20_000).for_each(|_| counts[corpus.draw(&mut rng) as usize] += 1);
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn harmonic_numbers_are_those_of_the_sum() {
        for exponent in [0.0, 0.5, 0.8, 1.0, 1.3] {
            let sum: f64 = (1..=50_000).map(|rank| f64::from(rank).powf(-exponent)).sum();
            let error = (harmonic(50_000, exponent) / sum - 1.0).abs();
            assert!(error < 1e-7, "exponent {exponent}: off by {error}");
        }
    }

    #[test]
    fn requests_come_at_their_rate_with_different_chunks() {
        let scenario =
            scenario(&["--rate=2/worker", "--requests=4000", "--corpus=50", "--gateways=3", "--jitter=0.5"]);
        let corpus = Corpus::new(&scenario, 5);
        let case = scenario.cases(5).next().unwrap();
        let arrivals: Vec<Arrival> = Traffic::new(&scenario, 5, case.rate, &corpus).collect();
        assert_eq!(arrivals.len(), 20_000);
        let gaps: Vec<f64> = arrivals.windows(2).map(|pair| pair[1].time - pair[0].time).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!((mean - 0.1).abs() < 0.003, "{mean} s between requests of 10 a second");
        // The deviation of exponential times is their mean.
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.05, "{}", variance.sqrt() / mean);
        for gateway in 0..3 {
            let share = arrivals.iter().filter(|arrival| arrival.gateway == gateway).count();
            assert!((6300..7000).contains(&share), "gateway {gateway} gets {share}");
        }
        assert!(arrivals.iter().all(|arrival| {
            let mut chunks = arrival.chunks.clone();
            chunks.sort_unstable();
            chunks.dedup();
            chunks.len() == 5 && (0.5..1.5).contains(&arrival.slowness)
        }));
    }
}
