//! Ctrl-C and SIGTERM, which stop a server.

/// Waits for Ctrl-C or SIGTERM. A second one ends the program at once.
pub async fn stop_signal() {
    next_signal().await;
    tokio::spawn(async {
        next_signal().await;
        std::process::exit(130);
    });
}

async fn next_signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}
