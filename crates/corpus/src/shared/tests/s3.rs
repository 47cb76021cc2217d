//! Documents shared over a real S3 server (moto, from the Python package index), behind a proxy that can drop connections. Skipped, saying so,
//! where moto is not installed.

use std::cell::RefCell;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use refrain_store::{Limits, RemoteOptions, Store};

use super::away::{changes_wait_for_the_object_store, try_sync};
use super::moto::{Moto, settings};
use super::replicas::{all_agree_after_races, both_put_the_same, what_one_machine_changes_is_changed_on_all};
use super::{Bucket, Machine};
use crate::conformance::{self, list, put, sync};
use crate::document_store::DocumentStore;
use crate::notes::now;
use crate::shared::SharedDocuments;
use crate::shared::objects::{ChangesObject, change_name, encode};

struct S3 {
    /// Alive as long as the test.
    _moto: Moto,
    proxy_port: u16,
    network: Arc<Network>,
}

/// The proxy.
#[derive(Default)]
struct Network {
    /// Whether it drops all connections.
    is_away: AtomicBool,
    /// What a request is refused for that has it in its head.
    forbidden: Mutex<Option<String>>,
}

/// A folder of the server's bucket.
struct Prefix<'a>(&'a S3, String);

impl Bucket for Prefix<'_> {
    fn options(&self) -> RemoteOptions {
        self.0.options(&self.1)
    }
}

impl S3 {
    /// A server with a bucket; none where moto is not installed.
    fn start() -> Option<S3> {
        let moto = Moto::start("documents")?;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (server_port, proxy_port) = (moto.port, listener.local_addr().unwrap().port());
        let s3 = S3 { _moto: moto, proxy_port, network: Arc::default() };
        let network = s3.network.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let network = network.clone();
                thread::spawn(move || network.pass(&client, server_port));
            }
        });
        Some(s3)
    }

    fn options(&self, prefix: &str) -> RemoteOptions {
        let mut options = RemoteOptions::new(format!("s3://documents/{prefix}"));
        options.options = settings(self.proxy_port);
        options.timeout = Duration::from_secs(5);
        options
    }
}

impl Network {
    /// Passes a connection on, until the proxy is away or a request is forbidden.
    fn pass(&self, client: &TcpStream, server_port: u16) {
        if self.is_away.load(Relaxed) {
            return;
        }
        let server = TcpStream::connect(("127.0.0.1", server_port)).unwrap();
        let copy = |mut from: &TcpStream, mut to: &TcpStream, forbidden: Option<String>| {
            let mut bytes = [0; 1 << 14];
            while let Ok(read) = io::Read::read(&mut from, &mut bytes)
                && read > 0
                && !self.is_away.load(Relaxed)
            {
                if forbidden
                    .as_ref()
                    .is_some_and(|part| String::from_utf8_lossy(&bytes[..read]).contains(part))
                {
                    let answer = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                    let _ = io::Write::write_all(&mut from, answer);
                    break;
                }
                if io::Write::write_all(&mut to, &bytes[..read]).is_err() {
                    break;
                }
            }
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        };
        let forbidden = self.forbidden.lock().unwrap().clone();
        thread::scope(|scope| {
            scope.spawn(|| copy(&server, client, None));
            copy(client, &server, forbidden);
        });
    }
}

/// One server for all of it, since a server takes its time to start.
#[test]
fn documents_are_shared_over_s3() {
    let Some(s3) = S3::start() else { return };
    let (kept, count) = (RefCell::new(Vec::new()), RefCell::new(0));
    conformance::check(&|quota| {
        *count.borrow_mut() += 1;
        let options = s3.options(&format!("battery/{}", count.borrow()));
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open_shared(folder.path(), Limits::memory(0), &options).unwrap();
        let documents = SharedDocuments::open(None, quota, store.objects().unwrap()).unwrap();
        kept.borrow_mut().push((folder, store));
        Box::new(documents) as Box<dyn DocumentStore>
    });
    let prefix = |name: &str| Prefix(&s3, name.to_owned());
    what_one_machine_changes_is_changed_on_all(&prefix("all"));
    both_put_the_same(&prefix("both"), 5);
    all_agree_after_races(&prefix("races"), 15);
    changes_wait_for_the_object_store(&prefix("away"), &|hangs| s3.network.is_away.store(hangs, Relaxed));
    many_documents_come_in_pages(&prefix("many"));
    one_object_that_is_refused_stands_in_no_others_way(&s3, &prefix("refused"));
}

/// A document whose object may not be read is told, and the others come all the same.
fn one_object_that_is_refused_stands_in_no_others_way(s3: &S3, bucket: &dyn Bucket) {
    let (one, two) = (bucket.machine(), bucket.machine());
    let ids = ["a", "b", "c"].map(|text| put(&one.documents, "", text, &[]).unwrap().id);
    *s3.network.forbidden.lock().unwrap() = Some(format!("{}/document.json HTTP", ids[1]));
    // Connections that were made before know nothing of it.
    let two = two.restarted();
    for announced in 0..2 {
        assert!(try_sync(&two.documents).is_err());
        assert_eq!(list(&two.documents, "").len(), 2 + announced);
        let stats = two.documents.sharing().unwrap();
        assert!(stats.last_sync.is_some() && stats.trouble.is_some(), "{stats:?}");
        if announced == 0 {
            // Another is announced together with it.
            let new = put(&one.documents, "", "d", &[]).unwrap().id;
            let documents = vec![(String::new(), ids[1].clone()), (String::new(), new)];
            let time = now().as_millis() as u64;
            one.objects.put(&change_name(time, 0), encode(ChangesObject { documents })).unwrap();
        }
    }
    *s3.network.forbidden.lock().unwrap() = None;
    let two = two.restarted();
    two.list_next();
    sync(&two.documents);
    assert_eq!(list(&two.documents, "").len(), 4);
}

/// More documents than a listing's page has names.
fn many_documents_come_in_pages(bucket: &dyn Bucket) {
    let (one, two): (Machine, Machine) = (bucket.machine(), bucket.machine());
    let new: Vec<_> =
        (0..1100).map(|index| conformance::new_document("", &format!("text {index}"), &[])).collect();
    let (stored, outcome) = one.documents.put("", &new, "test");
    outcome.unwrap();
    assert!(stored.iter().all(|document| document.published == Some(true)));
    sync(&two.documents);
    assert_eq!(list(&two.documents, "").len(), 1100);
    // It is announced together, and found by what is announced as well.
    put(&one.documents, "", "further", &[]).unwrap();
    assert_eq!(sync(&two.documents).len(), 1);
}
