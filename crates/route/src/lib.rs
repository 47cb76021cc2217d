//! The choice of a worker for a request, for gateways before a fleet of workers that share one library of chunks.
//!
//! A [`Router`] knows the workers that discovery has found ([`Router::add`], [`Router::remove`]), the chunks that each holds and the
//! requests that each has, as workers publish them ([`State`]). [`Router::choose`] picks a worker for a request and books it there; the
//! [`Booking`] is held as long as the answer streams, and frees the place when it is dropped. Nothing here reads a clock, a socket or a
//! file: the time, chance and all that workers say are given. A router is of one model, whose keys it knows: workers with another
//! fingerprint, or other numerics where answers have to be equal to the bit, get a router of their own.
//!
//! # Load
//!
//! With several gateways, each knows its own requests exactly and those of the others as of the worker's latest state:
//!
//! ```text
//! load(w) = max(0, reported(w) − own as of that report) + own bookings now
//! ```
//!
//! separately for requests whose answer is being decoded (running) and those without a first token (waiting). A state that tells its
//! reader's own requests ([`State::own`]) makes that right however late it comes; without, the bookings at the time that it comes in
//! stand for them. An answer that comes whole has no first token before its end: bookings without one that are more than the requests
//! which the worker reports as waiting count as running, as far as it reports so many running ones. What other gateways send is known
//! only when the next state comes. With more than one gateway, workers should publish a state whenever their load changes: while gateways
//! see the same load of a second ago, they all choose the same worker.
//!
//! # The rule *cost*
//!
//! The worker with the smallest
//!
//! ```text
//! cost(w) = wait(w) + (1 + q) · work(w, h)                                                     seconds
//! ```
//!
//! - `q` are the requests that wait at the worker which has the fewest of them, 0 while one is idle. Where every worker has a queue, a
//!   second of work keeps `q` further requests waiting, and counts for them as well: a rule that looks at one request's time alone sends it
//!   to the shorter queue without its chunks, and a full fleet stays full.
//! - `wait(w)` is what has to be done before the request's turn: `own(w) + others(w) · service(w)`. `own` is the work of this gateway's
//!   bookings that have no first token yet, as estimated when they were booked, and passes with the time ([`Request::now`]): it ends at the
//!   time at which it was to end, but is no less than the work of all but one of them and no more than that of all. `others` are the
//!   requests of other gateways that wait, and `service` is the worker's own mean.
//! - `work(w, h)` are the seconds from its turn to its first token where `h` of its `T` chunk tokens are held:
//!
//! ```text
//! work(w, h) = min(fetched, prefilled)
//! fetched    = max(C, h · min(r, f) + [h < T] · latency + (T − h) · f)
//! prefilled  = max(C + (T − h') · p, h' · r)      h' = min(h, (C + T · p) / (r + p))
//!
//! C = (question + charge · T) · p      computed at any worker
//! p = 1 / prefill                      seconds to compute a token
//! r = bytes a token / local            seconds to read one out of memory or disk
//! f = bytes a token / remote           seconds to fetch one
//! ```
//!
//! Loading goes on beside computing, and missing chunks are fetched or prefilled, whichever is quicker. `min(r, f)` and `h'` let a
//! chunk count as missing that is read more slowly than it would be fetched or prefilled, so that no worker is chosen less for holding
//! more. Rates are each worker's own ([`Rates`]): a fleet may be of different machines. Until a worker has told its own, it has the mean of
//! those that others, up to 64, had told when it was added.
//!
//! Of equal costs the one with more tokens held is taken, then the one with fewer requests.
//!
//! # The rule *Tessera*
//!
//! Among the workers with at most `slack` requests more than the least loaded one, the one that holds most tokens of the request; of
//! equals the one with fewer requests; where none holds any, all of them are equal.
//!
//! # Equals
//!
//! Workers that are equal by all of this are ranked by rendezvous hashing of the smallest key that none of them holds, so that requests
//! which miss the same chunks meet at one worker, and one prefill or fetch serves them all. Where they hold all of the keys between
//! them, the caller's random number decides. No choice depends on the order of workers, chunks or states.
//!
//! # Size
//!
//! A choice looks up the request's keys, counts their holders, and goes over all workers twice: O(chunks × holders + workers). A pair
//! of key and worker takes 10 to 25 bytes in the worker's own list, and 2 to 4 in the key's list of holders. A key takes 37 to 75 bytes
//! beside, in which its first eight holders have their place. `tests/memory.rs` counts 59 bytes a pair where no two workers hold the same
//! key, and 19 where all hold the same. What [`Router::remove`] gives back of the key's map is used again, and stays with the process.

mod booking;
mod cost;
mod index;
mod rendezvous;
mod router;
mod sequence;
mod state;

pub use booking::Booking;
pub use cost::{Chunk, Estimate, Request};
pub use router::{Choice, Router, Rule, Settings, TooManyWorkers};
pub use state::{Load, Rates, Snapshot, State, Update, WorkerId};
